#include <halfstep/config.h>

#include <cstdio>

int main() { std::puts("halfstep " HALFSTEP_VERSION); }
