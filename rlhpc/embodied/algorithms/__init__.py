"""What happens to a policy's weights in a step."""
