"""What bounds tell of a whole softmax: top-p sets and draws, epsilon, guesses."""
