"""Tests that run over every method that discovery finds."""
