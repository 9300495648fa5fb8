"""The embedded deployment: a hybrid target of 7.4 M parameters and its block drafter, on code."""
