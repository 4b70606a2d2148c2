"""What every part of clawpipe shares, and the data path from records to training batches."""
