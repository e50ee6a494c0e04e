"""The page of a run or of several: words, tables and charts; `coterie.report.page` writes it."""
