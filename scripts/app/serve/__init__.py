"""What waits, what comes late and what is parked when requests share a pool: the real runner under a virtual clock."""
