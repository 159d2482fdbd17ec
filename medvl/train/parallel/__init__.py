"""Training on several ranks and transfer of batches to the device."""
