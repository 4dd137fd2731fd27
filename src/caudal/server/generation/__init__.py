"""From a validated request to its choices: submit, detokenize, stop strings, log-probabilities."""
