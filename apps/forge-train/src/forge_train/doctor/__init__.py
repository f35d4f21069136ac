"""`forge-train doctor`: finds what is wrong or slow on this machine, in steps that run independently of each other."""
