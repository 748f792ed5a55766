"""`transferd demo --pd`: a prefill and a decode node on one machine, as far apart as it allows."""
