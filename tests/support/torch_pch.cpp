// Exists so that the precompiled header has a program to belong to: gcc refuses one that was made for a
// library.
int main() {}
