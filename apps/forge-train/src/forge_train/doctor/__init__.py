"""`forge-train doctor`: what is wrong, or slow, with this machine, found in steps that cannot stop each other."""
