"""Worked experiments behind `posterity study NAME`, one folder each; nothing in `posterity` imports them."""
