"""Strategies side by side: a comparison, what it decodes, measures and keeps, and what its records say."""
