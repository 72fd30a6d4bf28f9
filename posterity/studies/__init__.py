"""Worked studies: an experiment from data to figures and numbers, each behind `posterity study NAME`."""
