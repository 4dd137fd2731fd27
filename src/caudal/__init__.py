"""Serves open-weights language models to many users at once."""
