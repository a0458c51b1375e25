"""From a prompt to tokens: prefill, the loop over rounds, sampling, saved states."""
