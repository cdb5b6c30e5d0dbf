"""What runs for clients: admission, answers and streams, and every way in which they end."""
