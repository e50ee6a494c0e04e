"""What everything else rests on: trees, random streams, files, plans as tables, signals."""
