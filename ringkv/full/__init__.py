"""Every frame kept, contiguous: a buffer that grows by doubling, or one preallocated for all sessions and masked."""
