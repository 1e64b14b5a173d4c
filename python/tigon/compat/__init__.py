"""Doors that other packages already knock at; each is opened by an explicit call."""
