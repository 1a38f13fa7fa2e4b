"""What a split of a model over devices costs in time and memory, without torch and without a device."""
