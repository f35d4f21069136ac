"""What this machine has: cores a process may use, and what its processor is good at. No torch."""
