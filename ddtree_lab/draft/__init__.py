"""Draft stage: committed tokens and the target's hidden states -> logits [D, V] for the D tokens after the root."""
