"""What people see: cards, figures and widgets."""
