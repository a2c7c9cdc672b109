"""What a command and a run are, without torch: flags, errors, folders, names of data."""
