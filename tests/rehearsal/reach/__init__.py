"""Which lines of Forge that only a device runs, no rehearsal reaches. `scope` says which lines those are, `record` marks in a
process with devices that they were run, and `unreached.txt` lists the others. `nox -s rehearsal` writes it anew."""
