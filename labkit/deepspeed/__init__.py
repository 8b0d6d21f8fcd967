"""DeepSpeed's engines and operators, for the lessons on offloading."""
