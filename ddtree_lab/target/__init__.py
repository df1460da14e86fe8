"""Target stage: a prompt or a draft tree -> the target's logits and hidden states, on top of one committed sequence."""
