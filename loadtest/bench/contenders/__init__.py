"""What takes turns in a bench, ours and others, behind one small interface each."""
