"""Links that shape updates: clipping, normalization, scales, decay, and constraints."""
