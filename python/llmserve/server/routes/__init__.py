"""The routes: what each takes, and how it words its answer."""
