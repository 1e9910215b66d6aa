"""Reports: records to numbers, numbers to what people and machines read."""
