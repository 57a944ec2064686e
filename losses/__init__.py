"""Token losses, advantages, token weights, KL estimators and corrections."""
