"""Closed forms and simulations that check the papers."""
