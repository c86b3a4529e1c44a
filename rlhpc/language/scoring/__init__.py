"""Groups that score what the model writes, and keep nothing of it: which there are, and what runs on their ranks."""
