// Declares the names of Gloo that LibTorch's ProcessGroupGloo.hpp mentions. LibTorch's wheel has Gloo
// compiled in and not its headers; all that is needed of these types is a pointer.
#pragma once
