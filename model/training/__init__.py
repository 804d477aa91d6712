"""Training of the reference model: sequences, footage, batches, optimizer and the loop that joins them."""
