"""Systems that only write reports: one file each, and the layers that they share."""
