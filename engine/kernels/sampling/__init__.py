"""Operations on logits: filter, penalise, draw, log-probabilities. One operation per file; each file has its
formula."""
