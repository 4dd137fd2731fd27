"""Counters, histograms and their Prometheus exposition."""
