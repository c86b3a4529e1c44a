"""Report pages of embodied runs."""
