// Version of this Halfstep and the visibility of its symbols.
#pragma once

#define HALFSTEP_VERSION_MAJOR 0
#define HALFSTEP_VERSION_MINOR 1
#define HALFSTEP_VERSION_PATCH 0
#define HALFSTEP_VERSION "0.1.0"

#define HALFSTEP_API __attribute__((visibility("default")))
