"""Endpoints, one file per API family."""
