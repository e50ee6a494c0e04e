"""Methods beside one another: which runs, how they are carried out, and what they show."""
