#!/bin/sh
# From a messy CSV of 60 hospitals to probabilities for new patients, in nine commands.
# docs/tutorials/hospitals.md explains each command and shows what it prints.
set -eu
python hospitals.py
coterie init patients.csv --client hospital --target readmitted --yes --out plan.toml
coterie run --plan plan.toml --epsilon 2 --quiet --out runs/patients
coterie predict runs/patients --data new_patients.csv --keep patient_id ward --out predictions.csv
head -n 9 predictions.csv
coterie verify runs/patients
coterie report runs/patients --figures figures
coterie budget --total 3 --run runs/patients
coterie run --plan plan.toml --epsilon 3 --quiet --out runs/again || echo "refused: the budget would be exceeded"
