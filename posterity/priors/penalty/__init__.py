"""Penalties and the priors that they mean."""
