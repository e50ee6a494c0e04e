"""Pages, tables and charts of finished runs."""
