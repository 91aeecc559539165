"""The tests that judge an implementation: of every method in this folder, of one method in the folder of its name."""
