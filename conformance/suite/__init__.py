"""The tests that judge an implementation: of every method in files of this folder, of one method in a folder of its name."""
