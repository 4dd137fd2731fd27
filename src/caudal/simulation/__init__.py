"""Runs the scheduler on a machine that is only a cost function, in virtual time."""
