"""Matrix products against weights, one file per storage format of the weights. Thread: device."""
