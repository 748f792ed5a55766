"""`transferd demo --pd`: a prefill and a decode node on one machine, in separate network namespaces if possible."""
