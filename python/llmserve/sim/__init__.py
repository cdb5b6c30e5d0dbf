"""What serving would be like, worked out in simulated time."""
